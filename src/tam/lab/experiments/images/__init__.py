"""Image classification, and further studies of the same trial under other command names."""

EXPERIMENTS = {"ablations": "ablations", "beyond": "beyond", "dynamics": "dynamics", "images": "studies"}
