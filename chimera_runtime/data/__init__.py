"""The data of a rank: loaders, the order of items, the micro-batches of an update."""
