"""Writes text with the weights that ``train.py --model examples/gpt.py --export FILE`` has left, in one process.

python examples/sample.py FILE [--bytes 300] [--seed 0]
"""

import argparse
import codecs

import gpt
import torch


def main() -> None:
    """Draws one byte after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="a state dict")
    parser.add_argument("--bytes", type=int, default=300, help="how many to write [default: 300]")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    model = gpt.build_stage(0, 1).eval()
    model.load_state_dict(torch.load(options.file, weights_only=True))
    torch.manual_seed(options.seed)
    text = torch.tensor([[*b"def "]])
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    print(decoder.decode(bytes(text[0].tolist())), end="", flush=True)
    with torch.no_grad():
        for _ in range(options.bytes):
            logits = model(text[:, -gpt.CONTEXT :])[:, -1]
            byte = torch.multinomial(logits.div(0.8).softmax(-1), 1)
            text = torch.cat([text, byte], dim=1)
            print(decoder.decode(bytes([int(byte)])), end="", flush=True)
    print(decoder.decode(b"", final=True))


if __name__ == "__main__":
    main()
