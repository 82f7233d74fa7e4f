"""Editors, by the Agent Client Protocol: `treenail acp`."""
