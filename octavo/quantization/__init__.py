"""How stored weights become numbers: formats of checkpoints and the packed formats that kernels read."""
