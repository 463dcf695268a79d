"""The callback for those who import `lightning`."""

from lightning.pytorch import Callback

from torchotel.integrations.lightning import LightningEvents


class TorchotelCallback(LightningEvents, Callback):
    """Tell of each step."""
