// SPDX-License-Identifier: Apache-2.0
package rmq.interop;

import com.alibaba.fastjson.JSONArray;
import com.alibaba.fastjson.JSONObject;
import java.io.IOException;
import java.net.Inet6Address;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.net.SocketAddress;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
// MessageExtBrokerInner is in the first of these packages since 5.0, before in the second.
import org.apache.rocketmq.common.message.*;
import org.apache.rocketmq.store.*;

/** Messages as JSON: the field names are those of rmq, a body is Base64, a host is {@code address:port}. */
final class Messages {
    private Messages() {
    }

    /** The message as RocketMQ has decoded it. */
    static JSONObject json(MessageExt message) {
        JSONObject json = new JSONObject(true);
        json.put("topic", message.getTopic());
        json.put("queue_id", message.getQueueId());
        json.put("queue_offset", message.getQueueOffset());
        json.put("phy_offset", message.getCommitLogOffset());
        json.put("size", message.getStoreSize());
        json.put("flag", message.getFlag());
        json.put("sys_flag", message.getSysFlag());
        json.put("born_timestamp", message.getBornTimestamp());
        json.put("born_host", host(message.getBornHost()));
        json.put("store_timestamp", message.getStoreTimestamp());
        json.put("store_host", host(message.getStoreHost()));
        json.put("reconsume_times", message.getReconsumeTimes());
        json.put("prepared_transaction_offset", message.getPreparedTransactionOffset());
        json.put("body_crc", message.getBodyCRC());
        json.put("body", message.getBody() == null ? new byte[0] : message.getBody());
        Map<String, String> properties = message.getProperties(); // null in 4.9.8 when there are none
        json.put("properties", properties == null ? Map.of() : new TreeMap<>(properties));
        json.put("keys", message.getKeys());
        json.put("tags", message.getTags());
        json.put("uniq_key", message.getProperty(MessageConst.PROPERTY_UNIQ_CLIENT_MESSAGE_ID_KEYIDX));
        json.put("offset_msg_id", message.getMsgId());
        return json;
    }

    /** What a broker would hand to its store. */
    static MessageExtBrokerInner single(JSONObject json) throws IOException {
        MessageExtBrokerInner message = new MessageExtBrokerInner();
        setCommon(message, json);
        message.setBody(json.getBytes("body"));
        message.setFlag(json.getIntValue("flag"));
        message.setPreparedTransactionOffset(json.getLongValue("prepared_transaction_offset"));
        MessageAccessor.setProperties(message, properties(json));
        message.setPropertiesString(MessageDecoder.messageProperties2String(message.getProperties()));
        return message;
    }

    /** The same for a batch: the common fields, and under {@code batch} those of each message. */
    static MessageExtBatch batch(JSONObject json) throws IOException {
        JSONArray items = json.getJSONArray("batch");
        List<Message> messages = new ArrayList<>();
        for (int i = 0; i < items.size(); i++) {
            JSONObject item = items.getJSONObject(i);
            Message message = new Message(json.getString("topic"), item.getBytes("body"));
            message.setFlag(item.getIntValue("flag"));
            MessageAccessor.setProperties(message, properties(item));
            messages.add(message);
        }
        MessageExtBatch batch = Release.newBatch();
        setCommon(batch, json);
        batch.setBody(MessageDecoder.encodeMessages(messages));
        return batch;
    }

    /** The answer to a put; a batch has one id for each message. */
    static JSONObject result(PutMessageResult result) {
        JSONObject json = new JSONObject(true);
        json.put("status", result.getPutMessageStatus());
        AppendMessageResult append = result.getAppendMessageResult();
        if (append != null) {
            json.put("append_status", append.getStatus());
            json.put("phy_offset", append.getWroteOffset());
            json.put("queue_offset", append.getLogicsOffset());
            json.put("store_timestamp", append.getStoreTimestamp());
            json.put("offset_msg_ids", append.getMsgId().split(","));
        }
        return json;
    }

    private static void setCommon(MessageExt message, JSONObject json) throws IOException {
        message.setTopic(json.getString("topic"));
        message.setQueueId(json.getIntValue("queue_id"));
        message.setSysFlag(json.getIntValue("sys_flag"));
        message.setBornTimestamp(json.getLongValue("born_timestamp"));
        message.setBornHost(address(json.getString("born_host")));
        message.setStoreHost(address(json.getString("store_host")));
        message.setReconsumeTimes(json.getIntValue("reconsume_times"));
    }

    private static Map<String, String> properties(JSONObject json) {
        Map<String, String> properties = new HashMap<>();
        json.getJSONObject("properties").forEach((name, value) -> properties.put(name, (String) value));
        return properties;
    }

    private static String host(SocketAddress address) {
        InetSocketAddress host = (InetSocketAddress) address;
        String text = host.getAddress().getHostAddress();
        return (host.getAddress() instanceof Inet6Address ? "[" + text + "]" : text) + ":" + host.getPort();
    }

    private static InetSocketAddress address(String host) throws IOException {
        int colon = host.lastIndexOf(':');
        InetAddress address = InetAddress.getByName(host.substring(0, colon));
        return new InetSocketAddress(address, Integer.parseInt(host.substring(colon + 1)));
    }
}
