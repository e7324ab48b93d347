"""Names of OpenPipe ART's for what this version does not do: their use says what to do instead."""

from offbook.base.errors import ConfigError

from ...client.other_trainers import NO_SFT


class TrainSFTConfig:
    """Stands for `art.TrainSFTConfig`."""

    def __init__(self, *args: object, **options: object) -> None:
        raise ConfigError(NO_SFT)


class ServerlessBackend:
    """Stands for `art.ServerlessBackend`."""

    def __init__(self, *args: object, **options: object) -> None:
        raise ConfigError("there is no hosted service: use RemoteBackend(url, api_key) with a server of your own")
