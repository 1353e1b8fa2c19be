"""Gradients as mixed-precision training makes them: a small GPT, trained on the Python sources of torch."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor, nn

STEPS, BATCH, LENGTH = 100, 32, 256
LAYERS, WIDTH, HEADS = 6, 256, 8  # 4.9 million parameters
TEXT_BYTES = 8 << 20


class ByteGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(LAYERS)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        x = self.token(tokens) + self.position.weight[:length]
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


def read_text() -> Tensor:
    """The first TEXT_BYTES of torch's sources in the order of their names, uint8."""
    text = bytearray()
    for path in sorted(Path(torch.__file__).parent.rglob("*.py")):
        text += path.read_bytes()
        if len(text) >= TEXT_BYTES:
            break
    return torch.frombuffer(text[:TEXT_BYTES], dtype=torch.uint8)


@functools.cache
def flat_gradients(device: str, steps: int = STEPS) -> Tensor:
    """float32[number of parameters]: the last step's gradients under autocast(bfloat16), end to end."""
    torch.manual_seed(0)
    text = read_text().to(device)
    model = ByteGPT().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    offsets = torch.arange(LENGTH + 1, device=device)
    for _ in range(steps):
        starts = torch.randint(len(text) - LENGTH, (BATCH, 1)).to(device)
        window = text[starts + offsets].long()
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = model(window[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def tiled_gradients(numel: int, device: str = "cuda") -> Tensor:
    """``flat_gradients`` over and over, float32[numel]; a codec of small tiles sees no repetition."""
    flat = flat_gradients(device)
    return flat.repeat(-(-numel // len(flat)))[:numel]
