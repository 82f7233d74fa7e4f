"""`python -m treenail` is the command line."""

from treenail.presenters.cli.main import main

if __name__ == "__main__":
    main()
