"""``python -m chimera_ir``, another way to call ``chimera``."""

from chimera_ir.start import module

if __name__ == "__main__":
    module()
