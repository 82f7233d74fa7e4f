"""Workflows: steps with dependencies over subagents, and the table of how they can end."""
