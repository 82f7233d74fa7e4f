"""Runs as tools for other programs: `treenail mcp serve`, over the Model Context Protocol."""

__all__: list[str] = []
