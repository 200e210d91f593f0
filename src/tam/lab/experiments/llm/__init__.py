"""Fine-tuning language models, scores on MTEB, and the paper's own tables of them."""

# Commands below `tam lab`, each as module:function of this package. Nothing is imported before one is called.
COMMANDS = {"score": "commands:score", "paper mteb": "commands:paper_mteb"}
