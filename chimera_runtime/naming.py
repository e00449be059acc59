"""stub."""


def names_in_model(model, stage, module):
    return {name: f"stages.{stage}.{name}" for name, _ in (*module.named_parameters(), *module.named_buffers())}
