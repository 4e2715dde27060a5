"""What files tell of runs, comparisons and federated runs. Nothing of it is believed before it is checked."""
