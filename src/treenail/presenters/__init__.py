"""Presenters: they show what the log says and pass on what a person wants. They decide nothing.

What they show is imported by its path, `treenail.history.projection`: a command line that only prints its
help must not load it.
"""

__all__: list[str] = []
