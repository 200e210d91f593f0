"""Ways to run trials: `local`, in processes of this machine, and `ray`, as tasks of a cluster."""
