"""Sentence encoders, scored by mteb on files that lie here."""
