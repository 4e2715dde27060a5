"""Commands about the price: epsilon, calibrate, audit."""
