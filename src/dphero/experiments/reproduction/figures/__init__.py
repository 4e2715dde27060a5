"""The paper's figures and its table: each module plans the runs that one kind needs, and presents what they found."""
