"""The texts of reports and claim pages."""

from pathlib import Path

from tam.lab.core.toml import read_toml

TEXTS = read_toml(Path(__file__).with_name("texts.toml"))
