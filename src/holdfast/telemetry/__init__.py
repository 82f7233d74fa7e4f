"""Telemetry: spans, metrics and structured logs for whoever asks for them; free for whoever does not."""
