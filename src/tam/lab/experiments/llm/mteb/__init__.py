"""Scores sentence encoders with mteb, on data files in a local folder."""
