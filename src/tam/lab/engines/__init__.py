"""What runs trials: processes of this machine, tasks of a Ray cluster, the ranks of a torchrun job."""
