"""Measures that others made, run on Treenail and on what people use instead.

`make proof` makes an environment for each of them, runs it, and writes `docs/proof.md`.
"""
