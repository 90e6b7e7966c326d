"""Training of the waveform codec."""
