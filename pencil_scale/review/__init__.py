"""Review: what became of the labels, for people to look at and to overrule."""
