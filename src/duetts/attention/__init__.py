"""The public face of the fast decode attention."""
