"""What is spoken, by whom, and the audio made from it."""
