// Its target owns the precompiled header of the layers above the kernels (CisternLayers.cmake).
