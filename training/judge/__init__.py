"""Judges of what was trained: words, voices and levels. None of them is ever a training loss."""
