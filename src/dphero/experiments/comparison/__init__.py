"""Many runs: plan them, share them out, gather them in a table."""
