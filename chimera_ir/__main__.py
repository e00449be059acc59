"""``python -m chimera_ir``: what ``chimera`` does."""

from chimera_ir.start import module

if __name__ == "__main__":
    module()
