// CartPole as an application that asks a run for actions: node external_cartpole.js PORT TOKEN_FILE [evaluation]
//
//   repertory train ppo --environment external:tcp://127.0.0.1:5556 --num-actors 1 --envs-per-actor 4
//     --evaluate-period None --max-env-steps 200000 --directory runs/external
//   for i in 1 2 3 4; do node examples/external_cartpole.js 5556 runs/external/clients.token & done
//
// With "evaluation", its episodes are for the evaluator. It ends when there was no actor for 60 seconds.
// The protocol: docs/external_clients.md.
"use strict";
const fs = require("fs");
const net = require("net");

const [port, tokenFile] = [Number(process.argv[2]), process.argv[3]];
const evaluation = process.argv[4] === "evaluation";
const PATIENCE = 60000; // milliseconds without an actor
const SILENCE = 600000; // milliseconds that an actor may take for an action

// Barto, Sutton and Anderson (1983), with the numbers of gymnasium's CartPole-v1.
class CartPole {
  reset() {
    this.state = [0, 0, 0, 0].map(() => 0.1 * Math.random() - 0.05);
    this.steps = 0;
    return this.state;
  }

  step(action) {
    let [x, speed, angle, turn] = this.state;
    const force = action === 1 ? 10 : -10;
    const [sin, cos] = [Math.sin(angle), Math.cos(angle)];
    const push = (force + 0.05 * turn * turn * sin) / 1.1;
    const turning = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - (0.1 * cos * cos) / 1.1));
    const speeding = push - (0.05 * turning * cos) / 1.1;
    x += 0.02 * speed;
    speed += 0.02 * speeding;
    angle += 0.02 * turn;
    turn += 0.02 * turning;
    this.state = [x, speed, angle, turn];
    this.steps += 1;
    this.fell = Math.abs(x) > 2.4 || Math.abs(angle) > (12 * Math.PI) / 180;
    return this.state;
  }
}

let lastContact = Date.now();

function connect() {
  const game = new CartPole();
  const socket = net.connect(port, "127.0.0.1");
  let received = "";
  const send = (message) => socket.write(JSON.stringify(message) + "\n");

  function begin() {
    send({ type: "start_episode" });
    send({ type: "get_action", observation: game.reset() });
  }

  function act(action) {
    const observation = game.step(action);
    send({ type: "log_reward", reward: 1 });
    if (game.fell || game.steps === 500) {
      send({ type: "end_episode", observation, truncated: !game.fell });
      begin();
    } else {
      send({ type: "get_action", observation });
    }
  }

  function take(message) {
    lastContact = Date.now();
    if (message.type === "welcome") begin();
    else if (message.type === "action") act(message.action);
    else if (message.type === "busy") socket.end(); // Another actor may need a client.
    else {
      console.error(`refused: ${message.message}`);
      process.exit(1);
    }
  }

  socket.setNoDelay(true);
  socket.setKeepAlive(true, 30000);
  socket.setTimeout(SILENCE, () => socket.destroy());
  socket.on("connect", () => {
    send({
      type: "hello",
      protocol: 1,
      token: fs.readFileSync(tokenFile, "utf8").trim(),
      observation: { shape: [4], dtype: "float32" },
      action: { shape: [], dtype: "int64", num_values: 2 },
      evaluation,
    });
  });
  socket.on("data", (data) => {
    const lines = (received + data).split("\n");
    received = lines.pop();
    lines.forEach((line) => take(JSON.parse(line)));
  });
  socket.on("error", () => {}); // "close" follows.
  socket.on("close", () => {
    if (Date.now() - lastContact < PATIENCE) setTimeout(connect, 100);
  });
}

connect();
