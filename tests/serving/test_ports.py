import socket

from sandhi_core.serving.ports import HOST, reserved


def test_a_port_is_nobody_elses_until_its_server_listens_and_after() -> None:
    with reserved(50) as ports:
        assert len(set(ports)) == 50
        with reserved(200) as others:
            assert not set(ports) & set(others)
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind((HOST, ports[0]))
            server.listen()
            with socket.create_connection((HOST, ports[0]), timeout=5):
                pass
