"""Judges: feedback while a run goes on and verification before it may stop, by rules and by a model."""
