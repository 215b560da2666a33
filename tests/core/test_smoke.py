from tellin.protocol import FinishReason
from tests.core.driver import Driver


def test_many_requests_equal_lone_runs() -> None:
    driver = Driver(num_kv_blocks=24, max_num_batched_tokens=16)
    for i in range(12):
        driver.add(f"r{i}", [i % 3] * (3 + i) + [7, 8], 5 + i)
    driver.run()
    for i in range(12):
        driver.check_lone(f"r{i}", 5 + i)
        assert driver.finish[f"r{i}"] is FinishReason.LENGTH
    driver.check_idle()
