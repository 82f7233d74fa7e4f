"""`python -m holdfast` is the command line."""

from holdfast.presenters.cli.main import main

if __name__ == "__main__":
    main()
