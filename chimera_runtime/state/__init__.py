"""The weights of a pipeline under the model's own names: state dicts, export, averages."""
