"""A look inside: does the noise, the lots and the price follow the law that is claimed?"""
