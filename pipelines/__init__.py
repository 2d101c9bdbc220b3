"""Jobs over the library: each is a verb, a `main(argv)` around a `run` that can be run again."""
