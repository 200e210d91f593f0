"""Real trainings with the frameworks. Nothing is fetched: models are made from their configurations."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
