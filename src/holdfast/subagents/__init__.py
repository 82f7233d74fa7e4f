"""Subagents: child sessions under supervision, and the table of how they can end."""
