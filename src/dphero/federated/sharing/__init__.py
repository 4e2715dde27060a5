"""FedFed's shared data set."""
