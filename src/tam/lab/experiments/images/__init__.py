"""Image classification, and further studies of the same trial with command names of their own."""

EXPERIMENTS = {"ablations": "ablations", "beyond": "beyond", "dynamics": "dynamics", "images": "studies"}
