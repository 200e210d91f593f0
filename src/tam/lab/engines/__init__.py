"""Ways to run trials: `local`, in processes of this machine."""
