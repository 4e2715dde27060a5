"""What is examined before a release: exact or refused."""
