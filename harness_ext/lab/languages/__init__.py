"""Synthetic languages, one module each; a language is a frozen dataclass of explicit probability tables."""
