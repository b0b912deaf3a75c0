"""How many operations the host launches for a loss, as `bench_host` counts them with the kernels of a GPU."""

import bench_host
import torch

from llmdistill.losses import matrix_mse


def test_a_launch_is_one_operation():
    student, teacher = torch.randn(2, 3, 4, requires_grad=True), torch.randn(2, 3, 4)
    mask_BT = torch.ones(2, 3, dtype=torch.long)
    with bench_host.kernels(), bench_host.Operations() as counted:
        loss = matrix_mse(student, teacher, mask_BT)
    # Room for the gradient and the shares of the sum, the kernel and the sum; and the mask: real tokens, their number.
    assert counted.count == 4 + 2
    torch.testing.assert_close(loss.sum, (student - teacher).square().mean(-1).sum())
