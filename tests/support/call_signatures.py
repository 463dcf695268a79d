"""Signatures of module calls without shapes."""

from torchotel._records import CallSignature, ModuleInfo


def call_signature(path: str = "Net", device: str = "cpu") -> CallSignature:
    """Return the signature of a call of one module, on a device."""
    return CallSignature(
        module=ModuleInfo("Net", path, "Linear", 0, 1),
        input_shapes=None,
        output_shapes=None,
        input_dtypes=None,
        output_dtypes=None,
        grad_input_shapes=None,
        grad_output_shapes=None,
        device=device,
        training=True,
        grad_enabled=True,
        compiled=False,
    )
