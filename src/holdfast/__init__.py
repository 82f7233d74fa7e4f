"""A runtime for LLM agents whose runs can be trusted."""
