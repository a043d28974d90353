"""The CUDA device. `driver` is the only module that calls CUDA; no other module here needs cuda-bindings to import.

Importing this package loads no CUDA library: `driver.load_driver` does, at first use.
"""

from kvstow.devices.cuda.context import CudaFence, CudaRegistrar
from kvstow.devices.cuda.device import CudaDevice, CudaOptions
from kvstow.devices.cuda.driver import DriverError, DriverUnavailableError

__all__ = ["CudaDevice", "CudaFence", "CudaOptions", "CudaRegistrar", "DriverError", "DriverUnavailableError"]
