"""The stream: the images of an epoch, in the order of the plan, in batches."""
