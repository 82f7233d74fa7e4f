"""The inspector: runs in a browser, live, with what a person can do to them."""
