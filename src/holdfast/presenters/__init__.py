"""Presenters: they show what the log says and pass on what a person wants. They decide nothing."""
